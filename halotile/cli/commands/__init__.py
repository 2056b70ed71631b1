"""The commands of ``recon-cli``. Each reads its words, calls one function of another room, and shows what comes back."""
