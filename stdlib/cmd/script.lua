-- Loads and runs a user's script for the verbs that need one; returns what it returns.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local globals = require "dtrain.cmd.globals"

-- `return dt.job { ... }` is a tail call, which leaves no frame to take a line from. In parentheses it is none, and
-- line numbers stay; where that does not compile the text stays as it is.
local function keep_frame(source)
  local at
  for start in ("\n" .. source):gmatch("\n()return[%s(%w]") do at = start end
  if not at then return source end
  return source:sub(1, at + 4) .. " (" .. source:sub(at + 5) .. "\n)"
end

local function read(path)
  local file, message = io.open(path, "rb")
  if not file then error(("dtrain: cannot open the script %s: %s"):format(path, message:gsub("^.-: ", "")), 0) end
  local source = file:read("a")
  file:close()
  if not source then error(("dtrain: %s cannot be read; give a Lua file"):format(path), 0) end
  return (source:gsub("^\xef\xbb\xbf", "", 1):gsub("^#[^\n]*", "", 1)) -- a byte-order mark, as Windows' editors write it
end

-- A name that a script would have with a line that it lacks: `nn` is dt.nn.
local function hint(name)
  local dt = require "dtrain"
  if name == "dt" then return 'write local dt = require "dtrain" first' end
  if rawget(dt, name) ~= nil then return ("did you mean dt.%s?"):format(name) end
end

--- words: the script's path and what follows it.
return function(words)
  local path = words[1]
  if not path then
    error(("dtrain: %s needs a script; write dtrain %s script.lua"):format(cli.verb, cli.verb), 0)
  end
  local source = read(path)
  local chunk, message = load(source, "@" .. path, "t")
  if not chunk then error(message, 0) end
  chunk = load(keep_frame(source), "@" .. path, "t") or chunk
  core.script(path)
  cli.words = table.move(words, 2, #words, 1, {})
  local folder = path:match "^.*/" or ""
  globals.beside(folder == "" and "./" or folder)
  arg = { [0] = path, table.unpack(words, 2) } -- luacheck: globals arg
  globals.strict(folder, hint)
  local result
  if cli.capture then -- a script with a loop of its own ends where it makes the engine
    local ok
    ok, result = pcall(chunk, path, table.unpack(words, 2))
    if not ok and not require "dtrain.job".is(result) then error(result, 0) end
  else
    result = chunk(path, table.unpack(words, 2))
  end
  cli.options() -- what neither the script nor dtrain knows is an error
  if cli.given.help then
    if core.rank() == 0 then
      print("options of dtrain (" .. path .. " declares none of its own):")
      for _, line in ipairs(cli.help_lines()) do print(line) end
    end
    os.exit(0)
  end
  return result, path
end
