"""Carry out a plan: chunks, slabs, rings, schedules; here or on a Ray cluster."""
