"""The package root: names of modules, and what `import cubroker` guards."""
