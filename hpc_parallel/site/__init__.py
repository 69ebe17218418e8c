"""What a cluster offers: read from Slurm, written as a profile, checked from its login node."""
