"""What a step costs, and what would make it faster or smaller: `ft.anatomy`, `ft.hints`, `ft.ladder`, `ft.tune`."""
