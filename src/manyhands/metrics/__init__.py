"""What is measured, where it is written, and the report that sets it beside the plan. Listens; changes nothing."""
