"""Why memory ran out: rules over a `Case`, asked in order."""
