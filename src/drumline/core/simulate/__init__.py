"""When every action of a program runs under given costs, as a timeline."""
