"""What ranks noted while they ran: records, one clock for all, their timeline, the folder that keeps them."""
