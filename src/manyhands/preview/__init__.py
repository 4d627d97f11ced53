"""A run's rows as the model sees them: collected once, shown as text or page. Knows no torch."""
