//! The Python module `xkv_lmcache._native`.
