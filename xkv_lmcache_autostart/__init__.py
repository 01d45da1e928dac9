"""The launcher: `LMC_*` environment in, a running and supervised LMCache server out.

`python3 -m xkv_lmcache_autostart --help` lists every setting. `cli.py` is the way through the other modules.
"""
