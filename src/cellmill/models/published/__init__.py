"""Reading published single-cell models into model folders of cellmill."""
