"""The vmread backend: each rank reads its peers' memory, on one host, one system call for many rows."""
