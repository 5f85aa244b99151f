"""A simulated world: an event loop on virtual time, a network with faults, and disks that lose unsynced data; one seed
decides every run."""
