"""Examples that train with and without clipping; a package, as Opacus installs one of this name."""
