"""Creates small policies that are trained from scratch, such as the policy of the quickstart."""
