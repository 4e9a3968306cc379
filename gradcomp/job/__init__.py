"""Holds what a job is: its ranks, how they meet, what they tell each other and what they save. Knows no framework."""
