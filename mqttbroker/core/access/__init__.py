"""Who may connect, publish and read: policies, rules, bans, and what is logged of denials."""
