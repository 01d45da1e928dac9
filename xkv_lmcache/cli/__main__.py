"""`python3 -m xkv_lmcache.cli`, the same as `xkv`."""

from xkv_lmcache.cli import main

if __name__ == "__main__":
    main()
