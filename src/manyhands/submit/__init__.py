"""Jobs for clusters: the file that a scheduler takes, made from the plan, and the site's own client that submits it."""
