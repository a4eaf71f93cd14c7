"""What all network tools share: HTTP under deadlines, a guard of addresses, secrets, a store."""
