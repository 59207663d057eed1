"""The processes of stages: started and kept running here, or found on hosts, and what they serve."""
