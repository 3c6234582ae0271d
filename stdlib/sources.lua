-- The Lua files that a script is made of: its own, and those that it loads by require, dofile and loadfile, each with a hash of its
-- text. A run is known by them: ranks compare them before the first step, and a resume compares them with the checkpoint's.
local core = require "dtrain.core"
local util = require "dtrain.util"

local M = {}
local loaded = {}   -- { name of the file without its folder, hash }, each once
local required = {} -- names of modules that were seen when they were loaded

local function read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read "a" -- nil for a folder
  file:close()
  return text
end

local function base(path) return path:match "[^/]*$" end

-- What a file holds when it is loaded is what runs; it may be edited later.
local function note(path)
  local text = read(path)
  if not text then return end
  local entry = { base(path), core.hash(text) }
  for _, e in ipairs(loaded) do if e[1] == entry[1] and e[2] == entry[2] then return end end
  loaded[#loaded + 1] = entry
end

-- Puts note in front of every way to load a file.
local function watch()
  local find, load_file, do_file = package.searchers[2], loadfile, dofile
  package.searchers[2] = function(name)
    local loader, path = find(name)
    if type(loader) == "function" then
      required[name] = true
      note(path)
    end
    return loader, path
  end
  function loadfile(path, ...) -- luacheck: globals loadfile
    if path then note(path) end
    return load_file(path, ...)
  end
  function dofile(path) -- luacheck: globals dofile
    if path then note(path) end
    return do_file(path)
  end
end

-- Under a stock lua5.4 a script may require files before this library.
local function note_earlier()
  for _, name in ipairs(util.keys(package.loaded)) do
    local path = type(name) == "string" and not required[name] and not name:find "^dtrain%f[%W]"
      and package.searchpath(name, package.path)
    required[name] = true
    if path then note(path) end
  end
end

--- The hash of the script, and name and hash of each file that it has loaded so far, in the order of names; "none" without a script.
function M.text()
  local path = core.script()
  local own = path and read(path)
  if not own then return "none" end
  note_earlier()
  own = core.hash(own)
  local others = {}
  for _, e in ipairs(loaded) do others[#others + 1] = ("%s %s"):format(e[1], e[2]) end
  table.sort(others)
  if #others == 0 then return own end
  return ("%s, with %s"):format(own, table.concat(others, ", "))
end

--- A function of the script's: the file that defines it and a hash of its lines there, so that it is known again wherever in the
--- file it stands. What it calls in other files is known by M.text.
function M.of(f)
  if type(f) ~= "function" then return "a " .. util.kind(f) .. " that is called" end
  local i = debug.getinfo(f, "S")
  if i.what == "C" then return "a C function" end
  local path = i.source:match "^@(.*)"
  local text = path and read(path) or not path and not i.source:find "^=" and i.source
  if not text then return ("a function of %s:%d"):format(i.short_src, i.linedefined) end
  local lines, n = {}, 0
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do
    n = n + 1
    if i.what == "main" or n >= i.linedefined and n <= i.lastlinedefined then lines[#lines + 1] = line end
  end
  return ("a function of %s, lines %s"):format(path and base(path) or "a text", core.hash(table.concat(lines, "\n")))
end

watch()

return M
