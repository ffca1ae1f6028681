"""The benches of ``antiphon bench``: workloads as a caller sees them, the null step, the runtime's share."""
