"""Colours and type of the displays: one a category, told apart by people who see colours differently."""

from __future__ import annotations

from lowtide.records import Category

CATEGORY_COLOURS = {
    Category.PARAMETER: "#3d4f6b",
    Category.OPTIMIZER: "#8a97ab",
    Category.INPUT: "#b9a5d6",
    Category.GRADIENT: "#e8b04b",
    Category.ACTIVATION: "#4fa3a5",
    Category.TEMPORARY: "#d9705a",
}
BUDGET = "#b3263a"
INK = "#1f2937"
MUTED = "#6b7280"
GRID = "#e7e9ee"
REPLAY = "#6d5bd0"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
REPLAY_SHADE = "rgba(109,91,208,0.18)"
