"""How driver, scheduler and workers find and trust each other: addresses, certificates, the wait for a first worker."""
