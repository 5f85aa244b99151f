"""The simulated world: a loop on virtual time, a network with faults, disks that lose what is not synced; one seed."""
