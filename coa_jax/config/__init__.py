"""Settings: classes with bounds, overrides on the command line, and code that settings name.

Every class of settings derives from `fields.Bounded`. `extensions` finds the functions and classes
of users and of installed packages by name. `preflight` asks the parts of a run what they need, and
whether they can start. `installed` describes the installation: config files, extras, tested
versions. This package imports nothing else of coa_jax but `errors`, and neither JAX nor a client
library.
"""
