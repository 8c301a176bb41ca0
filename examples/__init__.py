"""Examples that train with and without clipping; Opacus installs another package `examples`."""
