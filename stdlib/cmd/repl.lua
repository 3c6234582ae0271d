-- dtrain repl: a Lua prompt where dt, nn, optim and data are at hand. An expression prints its value; a statement may
-- go over lines.
local core = require "dtrain.core"

local function read(prompt)
  if core.readline and core.isatty(0) then return core.readline(prompt) end
  return io.read("l")
end

-- A chunk from text: as an expression first. Returns chunk, or nil, message, whether more lines could complete it.
local function compile(text)
  local chunk = load("return " .. text, "=repl", "t")
  if chunk then return chunk end
  local message
  chunk, message = load(text, "=repl", "t")
  return chunk, message, message and message:find("<eof>", 1, true) ~= nil
end

return function()
  local dt = require "dtrain"
  for _, name in ipairs { "dt", "nn", "optim", "data" } do _G[name] = name == "dt" and dt or dt[name] end
  if core.isatty(0) then print("dtrain " .. core.version().version .. ": Lua with dt, nn, optim, data; Ctrl-D ends") end
  while true do
    local text = read("> ")
    if not text then break end
    local chunk, message, more = compile(text)
    while more do
      local line = read(">> ")
      if not line then break end
      text = text .. "\n" .. line
      chunk, message, more = compile(text)
    end
    if not chunk then
      print(message)
    elseif text:find("%S") then
      local results = table.pack(xpcall(chunk, function(e) return type(e) == "string" and e or tostring(e) end))
      if not results[1] then
        print(results[2])
      elseif results.n > 1 then
        print(table.unpack(results, 2, results.n))
      end
    end
  end
  if core.isatty(0) then print() end
  return 0
end
