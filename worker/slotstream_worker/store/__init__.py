"""All Redis of the worker: the inbox, the slot table and its scripts, leases, the app's config."""
