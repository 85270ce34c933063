"""The cost of a plan's collectives on a link: computed, and measured."""
