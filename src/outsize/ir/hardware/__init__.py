"""Holds data sheets: devices by kind with their peaks, and kinds of links with latency and bandwidth."""
