"""The simulated world: a loop on virtual time, a network that misbehaves, disks that forget; all from one seed."""
