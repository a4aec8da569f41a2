"""Where KV slots live: `pages` (which are free), `prefixes` (which are cached), `tables` (which belong to whom), and `kv`,
the only module that moves slots between the three."""
