"""The objects of `_pulsar`, the module of Pulsar's C++ client."""
