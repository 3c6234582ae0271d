-- Placements: each operation with its inputs divided in each way over two and three ranks, and over two axes of two, gives
-- the values and the gradients of one process. The cases are tests/dist/place_cases.lua; here some ways of each, all of
-- them with DT_ALL=1 (make test-all).
local dt = require "dtrain"
local cases = require "tests.dist.place_cases"
local compare = require "dtrain.compare"
local support = require "support"

local most = os.getenv "DT_ALL" and 1000000 or nil

-- NAME.safetensors -> run, NAME.error -> message.
local function results(ranks, ways)
  local dir = support.folder()
  local code, text = support.run(("tests/dist/place.lua --quiet --dir %s --most %d"):format(dir, most or ways or 1),
    { ranks = ranks, seconds = most and 3600 or 300 })
  assert.are.equal(0, code, text)
  local out = {}
  for file in support.list(dir):gmatch "%./([^\n]+)" do
    local name, kind = file:match "^(.*)%.(%a+)$"
    local path = dir .. "/" .. file
    out[name] = kind == "error" and support.read(path) or dt.load(path)
  end
  return out
end

describe("divided over", function()
  local one
  setup(function() one = results() end)
  for _, at in ipairs { { 2, 5 }, { 3, 3 }, { 4, 6 } } do
    local runs
    for _, c in ipairs(cases.list) do
      it(("%d ranks, %s equals one process"):format(at[1], c.name), function()
        runs = runs or results(table.unpack(at))
        local want, names, n = one[c.name], {}, 0
        assert.are_not.equal("string", type(want), want)
        for key in dt.sorted(want) do names[#names + 1] = key:match "^0 (.+)$" end
        for title, run in dt.sorted(runs) do
          if title:match "^(.-);" == c.name then
            n = n + 1
            assert.are_not.equal("string", type(run), title .. ": " .. tostring(run))
            local text = compare.runs(run, want, names, "f32")
            assert(not text, title .. ": " .. tostring(text))
          end
        end
        assert.is_true(n > 0)
      end)
    end
  end
end)
