"""Starting the ranks of this machine and watching them."""
