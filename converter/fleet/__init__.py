"""Roots full of versions: the follower, batches, leases, pins, retention."""
