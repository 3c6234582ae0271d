-- Every mistake of tests/errors/cases.lua gets one message of the form `file:line: what was wrong; what to do`, an exit code other
-- than 0, no stack of calls, no file left half-written; on ranks: all end within 5 s and the message is there.
local cases = require "tests.errors.cases"
local support = require "support"

local function run(case, ranks)
  local dir = support.folder()
  support.write(dir .. "/bad.lua", cases.script(case))
  for name, text in pairs(case.files or {}) do
    if name:find "/" then os.execute(("mkdir -p %s"):format(support.quote(dir .. "/" .. name:match "^(.*)/"))) end
    support.write(dir .. "/" .. name, text)
  end
  local before = support.list(dir)
  local words = case.plan and ("plan bad.lua --ranks %d"):format(case.plan) or "bad.lua " .. (case.words or "")
  local code, text, seconds = support.run(words, { dir = dir, ranks = ranks, seconds = 30, env = case.env })
  local message = text .. ("\n(exit code %d after %.1f s)"):format(code, seconds)
  assert.is_true(code ~= 0 and code ~= 124, message)
  local where = case.line and ("bad.lua:" .. case.line .. ": ") or ""
  local found
  for line in text:gmatch "[^\n]+" do
    local at = line:find(where, 1, true)
    found = found or (at and line:find(case.says, at) ~= nil)
  end
  assert.is_true(found, ("want '%s' and '%s' in one line of\n%s"):format(where, case.says, message))
  assert.is_nil(text:find "stack traceback", message)
  assert.is_nil(text:find "stdlib/", message)
  assert.is_true(seconds < (ranks and 5 or 3), message)
  local after = support.list(dir)
  if after ~= before then
    for name in after:gmatch "[^\n]+" do
      assert.is_true(before:find(name, 1, true) ~= nil or name:find "metrics.jsonl" ~= nil, "left behind: " .. name)
    end
  end
end

describe("a mistake", function()
  it("comes in at least 60 kinds", function() assert.is_true(#cases.list >= 60) end)
  for _, case in ipairs(cases.list) do
    if case.alone ~= false then it("alone: " .. case.name, function() run(case) end) end
  end
  for _, case in ipairs(cases.list) do
    if case.ranks then it(("on %d ranks: %s"):format(case.ranks, case.name), function() run(case, case.ranks) end) end
  end
end)
