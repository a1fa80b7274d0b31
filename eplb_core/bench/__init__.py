"""What ``eplb demo`` and ``eplb bench`` run: published geometries, contents that can be checked, ranks as processes."""
