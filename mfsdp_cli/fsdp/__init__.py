"""The sharding engine. Knows torch and nothing else of this package."""
