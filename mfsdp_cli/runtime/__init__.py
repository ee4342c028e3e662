"""Runs a plan: launching, topology, model chunks, data, records. Joins the other rooms."""
