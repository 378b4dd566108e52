"""Models of several kinds, each in one short file: `slotstream check examples.gru:model`."""
