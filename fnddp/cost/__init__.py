"""What a plan's collectives cost on a link: computed, and measured."""
