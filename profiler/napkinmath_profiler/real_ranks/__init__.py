"""Steps run by several real processes, recorded beside those that pretended ranks trace."""
