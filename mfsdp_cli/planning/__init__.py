"""From a request to a plan: sizes, layout, costs, search, document, validation."""
