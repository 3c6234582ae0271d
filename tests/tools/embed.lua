-- Writes the standard library into a C source: lua5.4 embed.lua out.c dir files...
-- The table is sorted by name (relative to dir) for the binary search in lua/l_core.c. Texts become string literals, one
-- line of C per line of Lua, which gcc reads much faster than lists of numbers.
local out, dir = arg[1], arg[2]
if not dir then
  io.stderr:write("usage: lua5.4 embed.lua out.c dir files...\n")
  os.exit(2)
end

local escapes = { ["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r", ["?"] = "\\?" }
local function literal(line)
  return '"' .. line:gsub('[%c"\\?\128-\255]', function(c) return escapes[c] or ("\\%03o"):format(c:byte()) end) .. '"'
end

local files = {}
for i = 3, #arg do
  local name = arg[i]
  if name:sub(1, #dir + 1) == dir .. "/" then name = name:sub(#dir + 2) end
  local f <close> = assert(io.open(arg[i], "rb"))
  files[#files + 1] = { name = name, text = f:read("a") }
end
table.sort(files, function(a, b) return a.name < b.name end)

local c = {
  "/* Made by tests/tools/embed.lua from " .. dir .. "/. Don't edit. */\n",
  "const struct { const char *name, *src; unsigned size; } dt_stdlib[] = {\n",
}
for _, f in ipairs(files) do
  c[#c + 1] = "{ " .. literal(f.name) .. ",\n"
  for line in f.text:gmatch("[^\n]*\n?") do
    if line ~= "" then c[#c + 1] = literal(line) .. "\n" end
  end
  c[#c + 1] = ("\"\", %d },\n"):format(#f.text)
end
c[#c + 1] = "{ 0, 0, 0 } };\n"
c[#c + 1] = ("const unsigned dt_stdlib_n = %d;\n"):format(#files)

local f <close> = assert(io.open(out, "wb"))
assert(f:write(table.concat(c)))
