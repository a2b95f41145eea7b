"""Times, memory and errors of the losses beside their rivals, and the pages that show them."""
