"""Many configurations: sweeps, searches, the largest that fits, plans for one GPU and for a
cluster."""
