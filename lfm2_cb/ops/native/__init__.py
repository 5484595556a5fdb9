"""The native kernels: built, loaded, checked, captured."""
