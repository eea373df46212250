//! The one place where core errors become Python exceptions.
