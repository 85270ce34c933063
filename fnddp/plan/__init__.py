"""Lowering: trace -> simplify -> combine -> order -> reuse -> Plan -> execute. Each pass is a file."""
