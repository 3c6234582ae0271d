-- What a script of the command line sees beside Lua's own: files next to it by `require`, from wherever it is started, and globals
-- whose names must have been set before they are read. Programs that only require "dtrain" keep their globals as they are.
local util = require "dtrain.util"

local M = {}

-- Names that a caller could have meant: its locals and upvalues, then globals.
local function names_at(level)
  local out = {}
  local info = debug.getinfo(level + 1, "f")
  local i = 1
  while true do
    local name = debug.getlocal(level + 1, i)
    if not name then break end
    if not name:find "^%(" then out[#out + 1] = name end
    i = i + 1
  end
  i = 1
  while info do
    local name = debug.getupvalue(info.func, i)
    if not name then break end
    if name ~= "_ENV" and name ~= "" then out[#out + 1] = name end
    i = i + 1
  end
  for _, name in ipairs(util.keys(_G)) do
    if type(name) == "string" then out[#out + 1] = name end
  end
  return out
end

-- Whether a chunk is the script's own or beside it: what it requires from elsewhere may look for globals that are not there.
local function own(source, folder)
  local path = source:match "^@(.*)"
  if not path then return not source:find "^=" end
  return path:sub(1, 1) ~= "/" or folder ~= "" and path:sub(1, #folder) == folder
end

--- Reading a global that was never set is an error in the files below `folder` (of the script, with its slash) and in relative ones.
--- `hint(name)`: more to say about a name, or nil.
function M.strict(folder, hint)
  local set = {}
  setmetatable(_G, {
    __newindex = function(t, name, value)
      set[name] = true
      rawset(t, name, value)
    end,
    __index = function(_, name)
      local caller = debug.getinfo(2, "S")
      if set[name] or type(name) ~= "string" or not caller or caller.what == "C" or not own(caller.source, folder) then return nil end
      util.fail("the name '%s' was never set; %s (rawget(_G, %q) reads a global that may be missing)", name,
        hint(name) or ("did you mean '%s'?"):format(util.nearest(name, names_at(2))), name)
    end,
  })
end

--- require finds files beside the script first.
function M.beside(folder)
  package.path = ("%s?.lua;%s?/init.lua;%s"):format(folder, folder, package.path)
end

return M
