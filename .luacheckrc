std = "lua54"
max_line_length = 135
self = false
files["tests/lua/*_spec.lua"] = { std = "+busted" }
exclude_files = { "tests/errors/*" }
files["tests/data/*"] = { max_line_length = false }
